// Types that a dashboard must have, over those of @grafana/schema. test_grafana_types.py appends the dashboards.
import type { AnnotationQuery, Dashboard, DataQuery } from "@grafana/schema";
import type * as BarGauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as Heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as Table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as TimeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the value of an enum ("absolute"), where TypeScript wants its name (ThresholdsMode.Absolute).
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
// Grafana fills in the options that a panel leaves out.
type Some<T> = T extends object ? { [K in keyof T]?: Some<T[K]> } : T;

// What Grafana's Prometheus plugin reads of an annotation besides; the package has no types of it.
interface FromPrometheus { titleFormat: string; textFormat: string; target: DataQuery & { expr: string } }

export type Page = Omit<Json<Dashboard>, "annotations"> & {
  annotations: { list: (Json<Omit<AnnotationQuery, "target">> & FromPrometheus)[] };
};
export interface Options {
  bargauge: Some<Json<BarGauge.Options>>;
  heatmap: Some<Json<Heatmap.Options>>;
  stat: Some<Json<Stat.Options>>;
  table: Some<Json<Table.Options>>;
  timeseries: Some<Json<TimeSeries.Options>>;
}
export interface Custom {
  bargauge: {};
  heatmap: Some<Json<Heatmap.FieldConfig>>;
  stat: {};
  table: Some<Json<Table.FieldConfig>>;
  timeseries: Some<Json<TimeSeries.FieldConfig>>;
}
